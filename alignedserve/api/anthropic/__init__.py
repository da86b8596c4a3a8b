"""Anthropic's Messages API: `message_request` translates bodies, `message_format` formats answers."""
