"""Model versions and galleries: what is added, adopted, checked, taken over and removed."""
