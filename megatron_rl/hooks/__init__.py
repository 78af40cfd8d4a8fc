"""Features of the trainer as update hooks: routing replay, route predictors, router balance, guards."""
