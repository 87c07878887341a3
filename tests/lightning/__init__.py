"""Tests of GraphPlanCallback inside a Lightning Trainer."""
