"""Sources of the score that PPO maximises."""
