"""Conversations of several turns with tools, and the endpoint that records agents which use the OpenAI API."""
