"""``turncache plan``: what retention, return, a larger pool or a host tier would each give.

A workload goes through a simulated engine, or prefill and decode engine, whose pools follow
the real lineage table, free queue, budgets and policies. README.md has the model.
"""
