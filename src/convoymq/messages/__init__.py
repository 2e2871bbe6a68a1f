"""Messages: their record in every encoding, and views of it. Pure functions, sans IO."""
