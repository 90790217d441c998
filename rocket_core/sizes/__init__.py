"""What is counted and what can be reached: budgets, targets, formats and their bytes. Loads no torch."""
