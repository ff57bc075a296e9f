"""Look inside one compilation: compile once, run nothing, keep what every stage made of it.

``capture.capture`` compiles and returns the records of ``graph``. ``fresh`` makes a callable that
Dynamo has not seen, ``decisions`` watches the reinplace pass, ``generated`` parses the generated
code, ``clones`` finds the clones of mutated tensors, ``printing`` writes nodes as a person would.
``pytorch`` holds every private name of PyTorch that they stand on. Imports nothing else of
``omni_kv``.
"""
