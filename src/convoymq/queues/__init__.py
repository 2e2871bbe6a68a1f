"""Queue types behind one interface."""
