"""JSON Schema (draft 2020-12) as a regular grammar whose texts are JSON and valid.

`grammar.schema_grammar` is the entry. `docs/structured-output.md` lists the supported keywords.
"""
