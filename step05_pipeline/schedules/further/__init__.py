"""Schedules that few readers need, and the way to bring one of your own as a table."""
