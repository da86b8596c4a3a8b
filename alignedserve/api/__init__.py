"""What requests mean and how they are answered, for gateways, batches and Python. Nothing here knows HTTP."""
