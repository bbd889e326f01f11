"""The planner of serving: the slice, the sharding form and the batch of a decode step, and why (Parts 7 and 8)."""

from scaling.plan.serve.candidates import Service, ServingPlan, plans

__all__ = ["Service", "ServingPlan", "plans"]
