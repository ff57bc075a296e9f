"""From experiments to pages: notebooks run headless, exercises, figures, the site and its PDF.

Imports everything else; only the command line and the notebooks import it. Public: ``exercises``,
``figures`` and ``notebooks``, as the notebooks use them.
"""
