"""What comes in and goes out: files written whole, text shown, and code of the user."""
