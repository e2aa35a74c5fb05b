"""Looking at what ranks do, from inside and from outside."""
