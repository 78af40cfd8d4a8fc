"""Conversations of several turns with tools, and the endpoint that records agents that use the OpenAI API."""
