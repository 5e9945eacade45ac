"""What the recipes need beside keras_het itself."""

MISSING = (
    "This recipe needs more than keras_het itself. Install it: pip install 'keras-het[recipes]'"
)
