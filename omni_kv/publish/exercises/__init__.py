"""Exercises that check themselves, and what they measure.

Imports what ``publish`` may import. Public: ``checking.check``.
"""
