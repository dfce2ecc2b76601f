"""What only the workbook needs: launch ranks from a cell, trace them, draw what they did, check exercises."""
