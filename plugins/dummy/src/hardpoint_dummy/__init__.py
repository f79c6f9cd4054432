"""A complete, deterministic platform without hardware for Hardpoint: the one to copy"""
