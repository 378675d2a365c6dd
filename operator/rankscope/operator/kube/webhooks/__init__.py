"""What the API server asks us when objects are made: injection into pods, checks of our own kinds."""
