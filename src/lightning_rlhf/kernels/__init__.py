"""Faster layers behind one switch; models work without them too."""
