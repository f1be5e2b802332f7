"""Captures: chosen steps of a running job recorded op by op, and sent as trees."""
