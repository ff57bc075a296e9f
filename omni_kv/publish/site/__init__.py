"""The report: a site and a PDF, built from executed notebooks.

Imports what ``publish`` may import. Public: ``build.build_report``; the site's configuration names
``sphinx``.
"""
