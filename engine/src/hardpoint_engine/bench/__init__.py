"""What ``hardpoint bench`` measures. Nothing here is imported by an engine."""
