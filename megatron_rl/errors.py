"""The one exception that is a message for the user: one line, naming the thing that is wrong and the remedy."""


class UserError(Exception):
    """Bad input or a broken environment. The command line prints it as a single line and exits with status 2."""
