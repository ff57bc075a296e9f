"""Experiments: plain functions from a typed case to a typed result. None prints or plots.

Imports ``model``, ``sandbox``, ``lens``, ``audits``, ``evidence`` and ``upstream``. Public: every
name without a leading underscore.
"""
