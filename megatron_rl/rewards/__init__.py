"""All of a reward: verifiers, reward models and judges, the length penalty, clipping and whitening."""
