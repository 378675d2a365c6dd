"""Collectors: one file, one class, one method that returns samples. They do not know each other, nor who reads them."""
