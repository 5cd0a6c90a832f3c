"""A recorded update made once more, and the pages that show it."""
