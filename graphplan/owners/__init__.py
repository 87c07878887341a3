"""Owners: walking them, naming them, finding them, and putting them back as they were."""
