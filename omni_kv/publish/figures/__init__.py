"""Figures: each function takes data, returns a figure, and runs nothing.

Imports what ``publish`` may import. Public: every name without a leading underscore.
"""
