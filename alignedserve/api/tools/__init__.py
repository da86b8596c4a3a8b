"""Tool calls: `formats` lists how families write, prompt and constrain calls; `call_parser` reads them in an answer."""
