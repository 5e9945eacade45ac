"""Dependencies of the recipes in addition to keras_het itself."""

MISSING = "This recipe needs more than keras_het itself. Install it: pip install '.[recipes]'"
