"""The demonstration: a real job at two commits, a service, a comparison, an alert, a gate."""
