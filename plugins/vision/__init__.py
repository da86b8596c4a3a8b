"""Pictures in prompts: models that see. The extra `vision`."""
