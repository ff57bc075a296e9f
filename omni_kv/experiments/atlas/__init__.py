"""The atlas: what each way to lay out and call KV pools gives, on each torch release.

``cells`` holds the axes and the classification, ``layouts`` the pools and the compiled functions,
``run`` runs cells in child processes, ``records`` keeps one file a release, ``lookup`` says what a
reader looks up in them, ``command`` is the command line with an environment a release; ``effect``
holds a record made with candidate fixes of the compiler against one made without. The code imports
on torch 2.4 and later. Imports ``sandbox``, ``lens``, ``evidence`` and ``upstream``. Public: every
name without a leading underscore.
"""
