"""`megatron-rl certify`: whether trainer and engine compute the same, and with which operator of which layer they part."""
