"""Real models with their own libraries, trained as their users train them: ``python -m recipes.zoo --help``."""
