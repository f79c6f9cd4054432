"""Models as native programs: fused operations that a library of the plugin's own computes."""
