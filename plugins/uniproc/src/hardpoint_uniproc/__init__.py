"""The in-process executor for Hardpoint"""
