"""What ``hardpoint bench`` measures."""
