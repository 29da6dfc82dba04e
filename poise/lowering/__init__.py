"""How mask objects become plain data, row intervals and tile maps; `poise/plan.py` puts the parts together."""
