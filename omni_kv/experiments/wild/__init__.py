"""KV caches in the forms that published models and engines keep them in, under the audit."""
