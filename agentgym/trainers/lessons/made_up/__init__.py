"""Made-up conversations with tools, which teach a model to read schemas and to copy: no two have the same tools."""
