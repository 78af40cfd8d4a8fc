"""Tools that a policy may call in a conversation, and the environment that answers the policy."""
