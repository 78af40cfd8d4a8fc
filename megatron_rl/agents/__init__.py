"""Conversations of several turns with tools, and the endpoint through which agents of others are recorded."""
