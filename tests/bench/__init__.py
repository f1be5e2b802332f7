"""Ratios measured side by side in one run. Nothing here is asserted: these machines are noisy."""
