"""Weight sync from trainer to engines: weights travel in buckets over a transport, and checksums of both sides are compared."""
