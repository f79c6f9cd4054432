"""The torch toolkit that Hardpoint platform plugins are built from"""
