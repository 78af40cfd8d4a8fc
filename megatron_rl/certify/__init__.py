"""`megatron-rl certify`: checks that trainer and engine compute the same numbers, and finds the first operator that differs."""
