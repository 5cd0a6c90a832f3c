"""Faster layers behind one switch: everything computes without them too."""
