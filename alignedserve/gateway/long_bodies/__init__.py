"""Long bodies, read in a process of their own: parsed, and their prompts encoded, while streams go on.

The gateway's process gets back a short body that says the same but for the prompt, which is encoded already.
"""
